"""Looking at stored runs from outside."""
