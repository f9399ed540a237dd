"""The same Adam step through tierstore and through others, each in a process of its own."""
