"""Answers of requests that have ended, in the form of the API that accepted them."""
