"""What tenants may use, and what they have used: one place for all gateways, in keys of each tenant's own."""
