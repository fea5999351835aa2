"""AWS: clients, roles, functions and what they say of themselves; boto3 is imported when first used."""
