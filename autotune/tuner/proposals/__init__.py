"""What is proposed: seeds, samplers, the history that they see, and what is not worth measuring."""
