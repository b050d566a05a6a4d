"""``autotune.fsdp``: FSDP2's collectives on C3's engines, chosen by timing the program's own training steps."""
