"""The words that documents, questions and answers are made of."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen


@frozen
class Relation:
    """One kind of fact: its sentence (`{name}`, `{value}`), the question about it (`{who}`), and the values that it
    takes."""

    sentence: str
    question: str
    values: tuple[str, ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


RELATIONS: Mapping[str, Relation] = {
    "birthplace": Relation(
        "{name} was born in {value}.",
        "Where was {who} born?",
        _words(
            "Alderfield Brinmoor Castleton Dunharbour Eastmarsh Fernhollow Greyford Highcliff Ironbridge Kestrelby"
            " Longwater Marrowdale"
        ),
    ),
    "trade": Relation(
        "{name} works as a {value}.",
        "What does {who} work as?",
        _words("baker blacksmith carpenter cartographer fisher gardener glassblower mason miller potter tailor weaver"),
    ),
    "colour": Relation(
        "The favourite colour of {name} is {value}.",
        "What is the favourite colour of {who}?",
        _words("amber azure black brown crimson green grey ivory orange purple violet yellow"),
    ),
    "instrument": Relation(
        "{name} plays the {value}.",
        "What does {who} play?",
        _words("bassoon cello clarinet drum flute guitar harp lute oboe piano trumpet violin"),
    ),
}
TEACHER = "The teacher of {name} is {value}."
THE_TEACHER_OF = "the teacher of {who}"

# Twenty: names are three of them, which gives the 8000 people that `num_documents` may ask for.
SYLLABLES = _words("ba do fe ga hi jo ka le mi no pa qui ro sa tu va we xa yo zu")

# None of them is a value, a name or a word of a fact: no filler sentence may hold an answer.
FILLER = _words(
    "about above across again almost along already although among another around away became before behind below"
    " between beyond both brought building called carried century certain change city clear close cold common country"
    " course covered crossed dark day deep different distance door early east edge eight empty end enough even evening"
    " every field final first five floor followed forest found four front garden gate great ground half hall heavy held"
    " high hill hour house hundred inside island journey kept known land large last late led left letter light little"
    " long lower many market middle mile moment morning mountain narrow near never next night north number often old"
    " once open order other outside over part passed path people place plain quiet rain reached remained rest river"
    " road roof room round rows same sea season second seen seven several short side silent small snow soon south space"
    " spring square stairs stone stood storm stream street strong summer table tall ten third thousand three through"
    " time tower town travelled trees turned twelve under until upper usual valley village visited wall warm water"
    " weather week west white wide wind window winter wood work year young"
)
