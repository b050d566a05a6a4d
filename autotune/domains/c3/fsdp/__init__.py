"""FSDP2's collectives by the engines of C3, chosen in the program's own steps: ``autotune.fsdp``."""
