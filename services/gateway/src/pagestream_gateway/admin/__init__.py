"""/admin/v1: what concerns all tenants, where administrators have keys; and calls that change what is served."""
