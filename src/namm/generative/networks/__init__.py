"""Networks that a diffusion model trains: `network(y_t, t)`, one folder or file each."""
