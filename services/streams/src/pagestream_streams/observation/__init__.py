"""What engines publish of themselves while somebody looks."""
