from mutants.matrix import answers_of

test_right_answers_pass, test_mistakes_are_named = answers_of("24")
