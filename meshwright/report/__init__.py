"""Plans and predictions for people: tables for the terminal. Imports no torch and prices nothing."""
