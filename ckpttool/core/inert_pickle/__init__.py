"""Any pickle read and written as inert values: nothing it names is imported or called"""
