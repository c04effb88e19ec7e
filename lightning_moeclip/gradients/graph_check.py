def find_leaks(*a):
    return []
