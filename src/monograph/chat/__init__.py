"""The surfaces people talk to: the terminal now, the server and its page later."""
