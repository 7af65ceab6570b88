"""Run folders: written so that they cannot be lost, read so that nothing is dropped."""
