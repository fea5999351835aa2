"""Communication between ranks: session, rendezvous, RPC, collectives, byte ledger, trace."""
