"""`diloco auth`: credentials, permissions, and the guard of the tape."""
