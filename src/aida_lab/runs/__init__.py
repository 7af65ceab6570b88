"""Run folders: written safely, read with all their problems reported, and collected into archives."""
