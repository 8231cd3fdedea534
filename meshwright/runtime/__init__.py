"""Training: a plan becomes processes, groups, modules and steps. Needs torch."""
