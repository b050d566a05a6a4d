"""The C3 suite: scenarios, families of strategies, what they reach of the ideal, tables and pictures."""
