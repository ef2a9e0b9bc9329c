"""Which format an answer has, written into its request's record, and what tools let a grammar force."""
