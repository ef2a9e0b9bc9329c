"""/admin/v1: what concerns all tenants. It exists where administrators have keys, and opens to those keys alone."""
