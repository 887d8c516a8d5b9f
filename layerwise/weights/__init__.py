"""Where weights live, and how a stage gets them and gives them back."""
