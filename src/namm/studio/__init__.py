"""A local page to play with a finished run: `namm studio RUN`."""
