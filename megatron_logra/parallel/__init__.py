"""Process groups as explicit values, and collectives that backward mode and forward mode both understand."""
