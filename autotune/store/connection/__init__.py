"""From what the user wrote to a database of the right version, and servers that go away."""
