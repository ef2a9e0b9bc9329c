"""The APIs, a folder for each, and the HTTP server that those over HTTP share."""
