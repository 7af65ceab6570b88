"""What a user sees of runs while they go on."""
