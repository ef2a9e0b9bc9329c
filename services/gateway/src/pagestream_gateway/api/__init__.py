"""The APIs, one folder for each."""
