"""What a careful reader takes for the answer of a text, for data of one's own: found, hidden and scored by one rule."""

import asyncio
import pickle
import time

import pytest

from marl.rewards import AnswerRules, Builtin, Reward
from marl.rewards.numbers import simplified
from marl.rewards.prose import HideProse, Prose
from marl.types import Task

NUMBERS = [
    # stated
    ("The answer is 14.", "14"),
    ("the answer is: 14", "14"),
    ("answer: 14", "14"),
    ("Answer = 14", "14"),
    ("**Answer**: 14", "14"),
    ("**Answer:** 14 apples", "14"),
    ("**Final Answer**\n\n14", "14"),
    ("### Answer\n14 apples", "14"),
    ("answer\uff1a14", "14"),
    ("A: 14 apples", "14"),
    ("Q: 9 + 5?\nA: 9 + 5 = 14", "14"),
    ("Ans. is 14", "14"),
    ("The final answer is $\\boxed{14}$. I hope it is correct.", "14"),
    ("The correct answer to the question is 14 because 9 + 5 = 14, and 3 are rotten.", "14"),
    ("So the answer should be 14, since 5 more were bought.", "14"),
    ("The answer is Tom has 20 - 11 = 9 apples.", "9"),
    ("The answer is that he needs 14 of the 20 boxes.", "14"),
    ("The answer is 14 (9 red ones and 5 green ones).", "14"),
    ("The answer is 14, not 15.", "14"),
    ("The answer is not 5 but 6.", "6"),
    ("The answer is not 5. It is 6.", "6"),
    ("My answer is 14. Bob says 15, but he forgot 1 apple.", "14"),
    ("The answer is:\n\n$$14$$", "14"),
    ("The answer is:\n\\[\n14\n\\]", "14"),
    ("The answer is **14**. There were 9 red and 5 green ones.", "14"),
    ("The answer is 12.\nWait, I forgot 2 of them.\nThe answer is 14.", "14"),
    ("Answer: x = 5", "5"),
    ("Answer: 1,250 dollars", "1250"),
    ("The answer is 3 million.", "3000000"),
    ("The answer is 9 a.m.", "9 am"),
    ("The answer is no solution.", "no solution"),
    ("The answers are 3 and 5.", "3 and 5"),
    ("The answer is 14 or 15.", "14 or 15"),
    ("The answer is", None),
    ("9 + 5 = 14. The answer is", "14"),
    # boxed
    (r"\boxed{14}", "14"),
    (r"\boxed 5", "5"),
    (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
    (r"So \boxed{12}. No, I forgot 2. The answer is 14.", "14"),
    (r"So 9 + 5 = 14, \boxed{1", "14"),
    # bold, displayed
    ("**14**", "14"),
    ("Tom has **14** apples, 5 more than before.", "14"),
    ("So **9 + 5 = 14**.", "14"),
    ("**Step 1:** Add 9 and 5.\n**Step 2:** We get 14.", "14"),
    ("$14$", "14"),
    (r"\(14\)", "14"),
    ("$$\n14\n$$", "14"),
    (r"\[ x = \frac{3}{4} \]", r"\frac{3}{4}"),
    ("We get $x + 3$.", "x + 3"),
    (r"Adding, $9 + 5 = 14$.", "14"),
    ("It costs $14.", "14"),
    ("He had $20, spent $6, and has $14 left.", "14"),
    ("#### 14", "14"),
    ("#### Step 1\nAdd 9 and 5.\n#### Step 2\nThat is 14.", "14"),
    # the last number or expression
    ("14", "14"),
    ("14.", "14"),
    (" 14 apples\n", "14"),
    ("9 + 5 = 14", "14"),
    ("So 9 + 5 = 14", "14"),
    ("Tom has 20 - 11 = 9 apples.", "9"),
    ("20 - 11 = 9 apples, 2 fewer than Ann.", "9"),
    ("f(x) = 2x + 3", "2x + 3"),
    ("The probability is 3/4.", "3/4"),
    ("He drinks 2 1/2 cups.", "2 1/2"),
    ("It is -3 degrees.", "-3"),
    ("The loss is \u22123.5.", "-3.5"),
    ("That makes 3.5e3 people.", "3500"),
    ("There are 6.02 \u00d7 10^23 of them.", "602000000000000000000000"),
    ("In all 1,234,567 people.", "1234567"),
    ("In all 12\u202f345 people.", "12345"),
    ("It was signed in 1648.", "1648"),
    ("It was on 2024-01-02.", "2024-01-02"),
    ("The train leaves at 10:30 am.", "10:30 am"),
    ("It is 50% of them.", "50%"),
    ("Half, or 50 percent.", "50%"),
    ("It is \u0661\u0664.", "14"),
    ("It is \uff11\uff14.", "14"),
    ("x lies in (1, 3].", "(1, 3]"),
    ("14\n\nThis is because 9 red and 5 green ones are added.", "14"),
    ("14. Tom buys 5 and had 9.", "14"),
    ("14 (9 + 5)", "14"),
    ("1. Tom has 9.\n2. He gets 5.\n3. Together 14.", "14"),
    ("Tom has 14 apples.\n\nCheck: 14 - 5 = 9.", "14"),
    ("Tom has 14 apples.\nConfidence: 90%", "14"),
    ("I agree with agent 2: it is 14, not 15.", "14"),
    ("It is 14, as in step 2.", "14"),
    ("He finishes 2nd with 14 points in a 3-legged race.", "14"),
    ("<think>9 + 5 is 15? No, 14.</think>\n14", "14"),
    ("<think>9 + 5 is 15", None),
    ("9 + 5 =", None),
    ("What is 9 + 5?", None),
    ("What is $9 + 5$?", None),
    ("What is 12/4?", None),
    ("I do not know what they ask for in this question.", None),
    ("", None),
]
WORDS = [
    ("The answer is yes.", "yes"),
    ("Yes.", "Yes"),
    ("**Yes**", "Yes"),
    ("Yes, because 5 > 3.", "Yes"),
    ("No, 9 is divisible by 3. So it is not a prime.", "No"),
    ("9 is divisible by 3. So no, it is not a prime.", "no"),
    ("The answer is: \u201centailment\u201d.", "entailment"),
    ("entailment", "entailment"),
    ("Label: neutral", "neutral"),
    ("The relationship is contradiction, since 2 men are not 3 men.", "contradiction"),
    (r"\boxed{\text{neutral}}", "neutral"),
    ("The capital of France is Paris.", "Paris"),
    ("The capital of France is **Paris**, with 2 million people.", "Paris"),
    ("It flew in 1969.\n\nAnswer: Apollo 11", "Apollo 11"),
    ("Answer: Tom Sawyer", "Tom Sawyer"),
    ("He thinks for a while and then he talks about the weather.", None),
    ("The answer is", None),
]
LETTERS = [
    ("B", "B"),
    ("(B)", "B"),
    ("B.", "B"),
    ("B) Paris", "B"),
    ("The answer is B.", "B"),
    ("The answer is (B) Paris.", "B"),
    ("The answer is (b).", "B"),
    ("The correct option is B: 14 apples.", "B"),
    ("Answer: B", "B"),
    ("**B**", "B"),
    ("**B) Paris**", "B"),
    (r"\boxed{B}", "B"),
    (r"\boxed{\text{(B)}}", "B"),
    ("A has 3 apples and is wrong, thus (B).", "B"),
    ("A: 14 apples", "A"),
    ("I choose option C because 5 > 3.", "C"),
    ("Answer: 14", "14"),
    ("A man walks into a bar.", None),
]
TABLE = [(text, "7", answer) for text, answer in NUMBERS] + [(text, "maybe", answer) for text, answer in WORDS]
TABLE += [(text, "D", answer) for text, answer in LETTERS]
RULES = AnswerRules()

WRITTEN = (
    "H2O|3,5|5 km/h|9.8 m/s^2|1, 2, 3|2x+1|2^10|\u00bd|\u221a2|2\u03c0|N/A|J. K. Rowling|Apollo 11|not_entailment|(b)|A, C|C++|x>5|5:3|foo@bar.com"
    "|2 January 2024|The cat sat on the mat.|Yes!|U.S.|SELECT * FROM t;|5!"
).split("|")
RIGHT = [
    # a peer's answer is not one's own
    ("My answer: 15\nBob's answer: 14", "15"),
    ("Bob's answer: 14\nMy answer: 15", "15"),
    ("I get 15. Agent 1's answer is 14.", "15"),
    ("Agent 1 says the answer is 15, but I get 14.", "14"),
    ("The answer is 14. The other agent's answer of 15 is wrong.", "14"),
    # taken back
    ("The answer is 15. Wait, that's wrong. It's 14.", "14"),
    ("\\boxed{15} Wait, I made an error. 7*2=14.", "14"),
    ("The answer is 14. Wait, let me double check: 9+5=14. Yes.", "14"),
    ("The answer is 15. Wait... no, it is 14.", "14"),
    ("The answer is 14. Tom had to wait 5 minutes.", "14"),
    ("The answer is 15 because he had to wait, then got 3 more.", "15"),
    ("Let's answer: 14", "14"),
    ("<thinking>The answer is 14</thinking> 15", "15"),
    # data formats, asides, units
    ('{"answer": "14", "confidence": 0.9}', "14"),
    ('{"final_answer": 14, "score": 10}', "14"),
    ('{"answer": "Paris", "confidence": 0.9}', "Paris"),
    ("<think>x</think><answer>14</answer>\n\nThis took 3 steps.", "14"),
    ("<b>14</b>", "14"),
    ("He paid $30 (after a 15% discount).", "30"),
    ("14 minutes (0.23 hours)", "14"),
    ("The area is 14 cm^2.", "14"),
    ("14 kg/m^3", "14"),
    ("The answer is 14\u20ac", "14"),
    ("The answer is 14\u00b0", "14"),
    ("There are 14 apples, more than 5.", "14"),
    ("Die Antwort ist 3,5.", "3,5"),
    ("Es kostet 1.234,50.", "1.234,50"),
    ("Maybe 12.", "12"),
    # letters
    ("I think it's B.", "B"),
    ("Antwort: B", "B"),
    ("\u7b54\u6848\uff1aB", "B"),
    ("So D.", "D"),
    ("A is the answer.", "A"),
    ("A) 3\nB) 4\n\nI choose A", "A"),
    # words
    ("The answer is the Eiffel Tower.", "Eiffel Tower"),
    ("I believe it's Paris.", "Paris"),
    ("The statement is true, not false.", "true"),
    ("The answer is C++.", "C++"),
    ("It is \\boxed{H2O}.", "H2O"),
]
WRONG = [
    ("My answer: 15\nBob's answer: 14", "14"),
    ("<think>So \\boxed{14}?</think> The answer is 15.", "14"),
    ("\\boxed{14}. No: the answer is 15.", "14"),
    ("", "."),
    ("The options:\nA) 3\nB) 4\nC) 5\nD) 6", "D"),
    ("Die Antwort ist 3,5.", "5"),
    ("It is either 12 or 15.", "15"),
    ("Between 40 and 45.", "45"),
    ("Es kostet 1.234,50 €", "50"),
    ("negative 5", "5"),
    *((text, "14") for text in ("The answer isn't 14.", "It cannot be 14.", "> 14", "at least 14", "less than 14", "half of 14", "14 squared")),
    *((text, "7") for text in ("twice 7", "7 times 2", "It's 7 + 7", "minus 7")),
]  # fmt: skip


@pytest.mark.parametrize(
    "text,truth,score",
    [(text, text, 1.0) for text in WRITTEN] + [(*row, 1.0) for row in RIGHT] + [(*row, 0.0) for row in WRONG],
)
def test_what_people_write_is_scored_as_they_mean_it(text, truth, score):
    assert asyncio.run(Builtin()("own/questions", text, truth))["score"] == score


@pytest.mark.parametrize("text,truth,answer", TABLE)
def test_a_careful_reader_takes(text, truth, answer):
    assert RULES.extractor("own/questions", truth)(text) == answer


@pytest.mark.parametrize("text,truth", [(text, truth) for text, truth, answer in TABLE if answer])
def test_what_is_taken_is_what_is_hidden_and_scored(text, truth):
    extract, hide = pickle.loads(pickle.dumps([RULES.extractor("mine", truth), RULES.hider("mine", truth)]))
    answer, shown = extract(text), hide(text)
    assert "[hidden]" in shown and extract(shown) != answer
    if answer.isdigit() and len(answer) > 1:
        assert answer not in simplified(shown).replace(",", "")
    score = asyncio.run(Reward(Builtin()).judge(Task("t", [], answer, "mine", extract), text))
    assert (score.value, score.answer) == (1.0, answer)


NASTY = {
    "digits": "1" * 100_000,
    "points": "1." * 50_000,
    "hashes by lines": "####\n" * 20_000,
    "boxes that stay open": r"\boxed{" * 15_000,
    "blanks": "the answer is" + " " * 100_000,
    "dollars": "$x " * 30000,
    "open brackets": r"\[ x " * 20000,
    "bold": "**x " * 25000,
    "equations": "x = 1\n" * 16000,
    "statements": "the answer is 1. " * 6000,
    "headlines": "answer\n" * 15000,
    "fractions": r"\frac{1}{" * 11000,
    "pairs": "(1," * 30000,
    "thoughts": "<think>" * 14000,
    "lines": "\n" * 100000,
    "one word": "a" * 50_000 + "1" * 50000,
}


@pytest.mark.parametrize("name", NASTY)
def test_a_text_of_a_hundred_thousand_characters_takes_no_time(name):
    started = time.process_time()
    read = Prose()
    read(NASTY[name]), HideProse(read)(NASTY[name])
    assert time.process_time() - started < 2.0
