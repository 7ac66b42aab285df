"""Policy synchronisation: factor packets, their sender and their receivers."""
