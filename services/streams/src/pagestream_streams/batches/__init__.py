"""Files and batches of tenants: what is uploaded, what runs of it, and what came of it."""
