"""`pagestream replay`: a past request, generated again."""
