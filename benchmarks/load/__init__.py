"""Published loads, fake peers and recorded streams around the load generator of `penstock bench`."""
