"""What lets the server run where there is no GPU and no `sgl_kernel`."""
