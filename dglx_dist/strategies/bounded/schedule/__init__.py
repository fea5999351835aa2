"""Who makes which move next: threads of one rank, or one thread for all ranks in a seeded order."""
