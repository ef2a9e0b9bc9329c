"""What both APIs share: submission, models, tokenization, authentication and limits."""
