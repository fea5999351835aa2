"""Who am I, who are the others, and how bytes travel between us: topology, calls, collectives, ledger."""
