"""Records to tables, pictures and run folders."""
