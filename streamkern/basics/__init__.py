"""What every room may use: errors, random numbers, threads, this machine, words for people."""
