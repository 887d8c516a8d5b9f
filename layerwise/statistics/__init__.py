"""What reaches linears: watched, summed exactly, reduced over ranks."""
