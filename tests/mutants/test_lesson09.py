from mutants.matrix import tests_of

test_right_answers_pass, test_mistakes_are_named = tests_of("09")
