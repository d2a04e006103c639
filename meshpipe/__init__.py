"""meshpipe: one large language model over machines that are far apart."""
