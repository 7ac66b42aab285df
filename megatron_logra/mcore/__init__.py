"""Everything that touches Megatron-Core: its model with our linears, its schedules, its process groups."""
