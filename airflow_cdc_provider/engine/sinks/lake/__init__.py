"""What sinks in files share, which have neither a server's types nor its transactions."""
