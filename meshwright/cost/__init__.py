"""What a plan costs: seconds and bytes."""
