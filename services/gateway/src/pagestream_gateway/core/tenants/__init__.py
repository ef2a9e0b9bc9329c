"""What tenants and their credentials may use."""
