"""Optional modules. A table in another package names each of them; each is imported when it is needed."""
