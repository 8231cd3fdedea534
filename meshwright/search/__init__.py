"""How the best plan is found."""
