"""Pages and interfaces over HTTP, for the browser and for programs. Needs the extra `serve`."""
