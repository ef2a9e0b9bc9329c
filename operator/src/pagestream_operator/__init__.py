"""The Kubernetes operator of Pagestream."""
