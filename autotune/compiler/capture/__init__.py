"""What autotune does in Inductor's compilation before regions are looked for; and how a search captures the same
graphs.
"""
