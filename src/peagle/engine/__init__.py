"""The engine: requests in, tokens out; everything here is token ids."""
