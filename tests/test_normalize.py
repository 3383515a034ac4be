"""Written text becomes spoken text, whatever the string; spoken text becomes phonemes by espeak-ng."""

import ctypes.util
import importlib.util
import re
import shutil
import subprocess
import sys
import timeit
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myxtts.config import LANGUAGES
from myxtts.errors import ConfigError
from myxtts.text import normalize as normalize_module
from myxtts.text import tables
from myxtts.text.normalize import (
    PACKAGES,
    normalize,
    normalize_fingerprint,
    phonemes_fingerprint,
    phonemize,
    voices,
)
from myxtts.text.numbers import cardinal, ordinal, plural_form, split_number

ZWNJ = "\u200c"

SPOKEN = {
    "en": [
        ("Dr. Smith & Mrs. Brown met Gen. Lee.", "doctor smith and misess brown met general lee."),
        ("It cost $5, £1 or €10.09.", "it cost five dollars, one pound sterling or ten euro, nine cents."),
        ("$5 million, US$ 3.50, -$2", "five million dollars, three dollars, fifty cents, minus two dollars"),
        ("Over 1,234,000 (20%).", "over one million, two hundred and thirty-four thousand (twenty percent)."),
        ("Pi is 3.14, not 3.10.", "pi is three point one four, not three point one zero."),
        ("On the 21st, 2ND and 3rd.", "on the twenty-first, second and third."),
        ("Pages 3-5; score 3-2.", "pages three to five; score three-two."),
        ("At 12:30 or 7:00.", "at twelve thirty or seven o'clock."),
        ("2:30pm or 7:00 o'clock", "two thirty pm or seven o'clock"),
        ("It was -5° in room #7 @ home.", "it was minus five degrees in room hash seven at home."),
        ("On 2000-05-12 or 5/12/2000.", "on may twelfth, two thousand or may twelfth, two thousand."),
        ("“Don’t go,” he said… ‘Why’—“no” reason", "don't go, he said... 'why' - no reason"),
        ("mp3 version 1.2.3, agent 007", "mp three version one point two point three, agent zero zero seven"),
        ("call 555-123-4567", "call five five five, one two three, four five six seven"),
        ("No. 5, no. Never", "number five, no. never"),
        ("ﬁne ＡＢＣ １２ ½ m² © 2 ™", "fine abc twelve one half m squared two"),
        ("soft\u00adhyphen zero\u200bwidth\ufeff no\u00a0break\x00\x07", "softhyphen zerowidth no break"),
        ("٣ and ३ and ①", "three and three and one"),
        ("[en] <b> *bold*", "(en) b bold"),
    ],
    "es": [
        ("El Sr. López y la Dra. Ruiz.", "el señor lópez y la doctora ruiz."),
        ("Cuesta $5.50 o €20.", "cuesta cinco dólares con cincuenta centavos o veinte euros."),
        ("$1, $21 y £1", "un dólar, veintiún dólares y una libra"),
        ("El 20% de 1.234 personas.", "el veinte por ciento de mil doscientos treinta y cuatro personas."),
        ("El 3º, la 3ª calle, 1.er mes", "el tercero, la tercera calle, primer mes"),
        ("¡Hola! ¿Qué tal?", "hola! ¿qué tal?"),
        ("Mide 1,75 metros & más", "mide uno punto siete cinco metros y más"),
        ("1 234 000 habitantes", "un millón doscientos treinta y cuatro mil habitantes"),
        ("12/05/2023", "doce de mayo de dos mil veintitrés"),
        ("de 3-5, -4°", "de tres a cinco, menos cuatro grados"),
    ],
    "fr": [
        ("M. Dupont & Mme. Curie", "monsieur dupont et madame curie"),
        ("le 1er mai, la 1re fois, le 3e", "le premier mai, la première fois, le troisième"),
        ("L’été, 21°", "l'été, vingt et un degrés"),
        ("5,75 et 1 234", "cinq virgule sept cinq et mille deux cent trente-quatre"),
        ("€20 ou 1 €", "vingt euros ou un euro"),
        ("Où est « Paris » ?", "où est paris ?"),
        ("à 12:30 et 1:00", "à douze heures trente et une heure"),
        ("1\u202f000\u00a0000 personnes", "un million personnes"),
        ("n° 5, 80%", "numéro cinq, quatre-vingts pour cent"),
        ("cœur, Noël, ÇA", "cœur, noël, ça"),
    ],
    "de": [
        ("Am 3. Mai 1999.", "am dritten mai eintausendneunhundertneunundneunzig."),
        ("Er ist 25. Sie lacht.", "er ist fünfundzwanzig. sie lacht."),
        ("€20, $1 oder $5,50", "zwanzig euro, ein dollar oder fünf dollar und fünfzig cent"),
        ("1.234 Leute, 3,5 km", "eintausendzweihundertvierunddreißig leute, drei komma fünf km"),
        ("Dr. Müller z.B. bzw. usw.", "doktor müller zum beispiel beziehungsweise und so weiter"),
        ("12:30 und 1:00", "zwölf uhr dreißig und ein uhr"),
        ("um 14:30 Uhr, um 14:00 Uhr", "um vierzehn uhr dreißig, um vierzehn uhr"),
        ("STRAẞE Äpfel", "straße äpfel"),
        ("„Hallo“, 20% & mehr", "hallo, zwanzig prozent und mehr"),
        ("12.05.2023", "zwölfte mai zweitausenddreiundzwanzig"),
        ("der 3te, am 1sten", "der dritte, am ersten"),
        ("1000000", "eine million"),
    ],
    "it": [
        ("Il Sig. Rossi e la Sig.ra Bianchi", "il signore rossi e la signora bianchi"),
        ("Il 3º giorno, la 3ª", "il terzo giorno, la terza"),
        ("Costa €20 o $5.50", "costa venti euro o cinque dollari e cinquanta centesimi"),
        ("£1 e $1", "una sterlina e un dollaro"),
        ("20% di 1.234", "venti per cento di milleduecentotrentaquattro"),
        ("3,5 chilometri", "tre virgola cinque chilometri"),
        ("È così, perché?", "è così, perché?"),
        ("21°C", "ventuno gradi c"),
        ("da 3-5 a -2", "da tre a cinque a meno due"),
        ("ecc. & Dott.", "eccetera e dottore"),
    ],
    "pt": [
        ("O Sr. Silva e a Dra. Costa", "o senhor silva e a doutora costa"),
        ("€20 ou $5.50", "vinte euros ou cinco dólares e cinquenta cêntimos"),
        ("R$ 2,50 e £2", "dois reais e cinquenta centavos e duas libras"),
        ("O 3º dia, a 3ª", "o terceiro dia, a terceira"),
        ("20% de 1.234", "vinte por cento de mil duzentos e trinta e quatro"),
        ("3,5 km", "três vírgula cinco km"),
        ("Não, está à mão!", "não, está à mão!"),
        ("10:00 e 10:15", "dez horas e dez e quinze"),
        ("-7°", "menos sete graus"),
        ("av. Brasil & cia.", "avenida brasil e companhia"),
    ],
    "pl": [
        ("$1, $2, £5", "jeden dolar amerykański, dwa dolary amerykańskie, pięć funtów"),
        ("5 zł i 2,50 zł", "pięć złotych i dwa złote, pięćdziesiąt groszy"),
        ("-5°", "minus pięć stopni"),
        ("3,14 i 0,05", "trzy przecinek czternaście i zero przecinek zero pięć"),
        ("20% z 1.234 osób", "dwadzieścia procent z tysiąc dwieście trzydzieści cztery osób"),
        ("3. maja", "trzeci maja"),
        ("Mam 25. To dużo.", "mam dwadzieścia pięć. to dużo."),
        ("Dr. Kowalski, np. św. Jan", "doktor kowalski, na przykład święty jan"),
        ("12.05.2023", "dwunasty maja dwa tysiące dwadzieścia trzy"),
        ("Zażółć GĘŚLĄ jaźń", "zażółć gęślą jaźń"),
    ],
    "tr": [
        ("İSTANBUL IŞIK Irmak", "istanbul ışık ırmak"),
        ("3. gün ve 5inci kat", "üçüncü gün ve beşinci kat"),
        ("Yaşım 25.", "yaşım yirmibeş."),
        ("%20 veya 20%", "yüzde yirmi veya yüzde yirmi"),
        ("3,5 ve 0,05", "üç virgül beş ve sıfır virgül sıfır beş"),
        ("$5 ve ₺2,50", "beş dolar ve iki lira elli kuruş"),
        ("1.234 kişi", "binikiyüzotuzdört kişi"),
        ("Dr. Ahmet vb.", "doktor ahmet ve benzeri"),
        ("-5°", "eksi beş derece"),
        ("29.10.1923", "yirmidokuz ekim bindokuzyüzyirmiüç"),
    ],
    "ru": [
        ("$1, $2 и $5", "один доллар, два доллара и пять долларов"),
        ("1%, 2%, 25%", "один процент, два процента, двадцать пять процентов"),
        ("3-й день, 5-я книга, 3-го", "третий день, пятая книга, третьего"),
        ("3,5 км", "три целых пять десятых км"),
        ("1 234 567", "один миллион двести тридцать четыре тысячи пятьсот шестьдесят семь"),
        ("Г-н Иванов и д-р Петров и т.д.", "господин иванов и доктор петров и так далее"),
        ("№ 5 & #6", "номер пять и номер шесть"),
        ("-5°", "минус пять градусов"),
        ("12.05.2023", "двенадцатый мая две тысячи двадцать три"),
        ("«Ёлка» — всё", "ёлка - всё"),
    ],
    "nl": [
        ("Dhr. Jansen & Mevr. Smit", "de heer jansen en mevrouw smit"),
        ("€1 en $5.50", "één euro en vijf dollar, vijftig cent"),
        ("de 3de, 1ste en 5e", "de derde, eerste en vijfde"),
        ("1.234 mensen, 3,5 km", "duizendtweehonderdvierendertig mensen, drie komma vijf km"),
        ("20% om 12:30", "twintig procent om twaalf uur dertig"),
        ("-5°", "min vijf graden"),
        ("bijv. enz.", "bijvoorbeeld enzovoort"),
        ("3-5 dagen", "drie tot vijf dagen"),
        ("12-05-2023", "twaalf mei tweeduizenddrieëntwintig"),
        ("Zo'n foto’s", "zo'n foto's"),
    ],
    "cs": [
        ("3. května", "třetí května"),
        ("21. ledna, 105. den", "dvacátý první ledna, sto pátý den"),
        ("Je mi 25. Ahoj.", "je mi dvacet pět. ahoj."),
        ("1%, 2%, 5%", "jedno procento, dvě procenta, pět procent"),
        ("5 Kč a 2 Kč", "pět korun a dvě koruny"),
        ("$5,50", "pět dolarů, padesát centů"),
        ("3,14", "tři celá čtrnáct"),
        ("-5°", "mínus pět stupňů"),
        ("Dr. Novák, např. atd.", "doktor novák, například a tak dále"),
        ("Příliš žluťoučký KŮŇ", "příliš žluťoučký kůň"),
    ],
    "ar": [
        ("عندي 25 كتابا.", "عندي خمسة و عشرون كتابا."),
        ("عندي ٢٥ كتابا.", "عندي خمسة و عشرون كتابا."),
        ("مرحبا، كيف حالك؟", "مرحبا، كيف حالك؟"),
        ("20٪ من الناس", "عشرون في المئة من الناس"),
        ("$5", "خمسة دولارات"),
        ("٣٫٥", "ثلاثة فاصلة خمسة"),
        ("١٬٢٣٤", "ألف و مئتان و أربعة و ثلاثون"),
        ("-5", "سالب خمسة"),
        ("مـــرحـــبا\u200f", "مرحبا"),
        ("ﻣﺮﺣﺒﺎ", "مرحبا"),
        ("007", "صفر صفر سبعة"),
    ],
    "hu": [
        ("3. nap, 5-ik", "harmadik nap, ötödik"),
        ("Ez 25. Jó.", "ez huszonöt. jó."),
        ("$5 és 2 Ft", "öt dollár és két forint"),
        ("3,5 km", "három egész öt tized km"),
        ("20% az 1.234", "húsz százalék az ezerkétszázharmincnégy"),
        ("Dr. Kovács pl. stb.", "doktor kovács például satöbbi"),
        ("-5°", "mínusz öt fok"),
        ("2023-05-12", "kétezer-huszonhárom május tizenkettedik"),
        ("12:30", "tizenkettő óra harminc"),
        ("ÁRVÍZTŰRŐ & Tükör", "árvíztűrő és tükör"),
    ],
    "ko": [
        ("나는 25살이다.", "naneun isib-osal-ida."),
        ("안녕하세요? 반갑습니다.", "annyeonghase-yo? bangabseubnida."),
        ("책이 3권 있다.", "chaeg-i samgwon issda."),
        ("20%의 사람들", "isib peosenteu ui salamdeul"),
        ("3번째 날", "se beon-jjae nal"),
        ("$5", "odalleo"),
        ("1,234", "cheon-ibaegsamsibsa"),
        ("3.14", "sam jeom il sa"),
        ("12:30", "sib-isi samsibbun"),
        ("1/2", "ibun-ui il"),
        ("TV & 책", "tv geuligo chaeg"),
    ],
    "hi": [
        ("मेरे पास 25 किताबें हैं।", "मेरे पास पच्चीस किताबें हैं।"),
        ("मेरे पास २५ किताबें हैं।", "मेरे पास पच्चीस किताबें हैं।"),
        ("1,00,000 और 12345678", "एक लाख और एक करोड़ तेईस लाख पैंतालीस हज़ार छह सौ अठहत्तर"),
        ("₹1 और ₹50", "एक रुपया और पचास रुपये"),
        ("20%", "बीस प्रतिशत"),
        ("3.14", "तीन दशमलव एक चार"),
        ("-5", "ऋण पाँच"),
        ("25वां दिन", "पच्चीसवां दिन"),
        ("राम & श्याम", "राम और श्याम"),
        ("12:30", "बारह बजकर तीस मिनट"),
        ("0 99 100", "शून्य निन्यानवे एक सौ"),
    ],
    "zh": [
        ("你好，世界。", "ni3hao3,shi4jie4,"),
        ("我有25块钱，100%", "wo3you3er4shi2wu3kuai4qian2,bai3fen1zhi1yi4bai3"),
        ("2023年5月12日", "er4ling2er4san1nian2wu3yue4shi2er4ri4"),
        ("今天天气很好！你呢？", "jin1tian1tian1qi4hen3hao3,ni3ne5,"),
        ("102本书", "yi4bai3ling2er4ben3shu1"),
        ("20000人", "liang3wan4ren2"),
        ("3.14", "san1dian3yi1si4"),
        ("1/2", "er4fen1zhi1yi1"),
        ("-5度", "fu4wu3du4"),
        ("¥5", "wu3yuan2"),
        ("３０分", "san1shi2fen1"),
        ("13812345678", "yi1san1ba1yi1er4san1si4wu3liu4qi1ba1"),
    ],
    "ja": [
        ("今日はいい天気です。", "kyou wa ii tenki desu."),
        ("東京タワーは高い。Hello、世界！", "tokyo tower wa takai. hello, sekai!"),
        ("今日は3月5日です。", "kyou wa san gatsu itsuka desu."),
        ("１２３人", "hyaku nijuu sannin"),
        ("100%", "hyaku percent"),
        ("10:30", "juu ji sanjuu fun"),
        ("「本」", "hon"),
        ("¥500", "gohyaku en"),
        ("-5度", "minus go do"),
        ("3.14", "san ten ichi yon"),
    ],
}  # fmt: skip

# «|» stands for the half-space.
PERSIAN = [
    # letters, marks and diacritics
    ("كتاب علي يك چيز ديگر است", "کتاب علی یک چیز دیگر است"),
    ("على و مصطفى", "علی و مصطفی"),
    ("ﺳﻼم ﮐﺘﺎب", "سلام کتاب"),
    ("ﻋﻠﻲ ﻛﺘﺎﺏ ﷺ", "علی کتاب صلی الله علیه وسلم"),
    ("ســـلام", "سلام"),
    ("مُحَمَّد و رَحمٰن", "محمد و رحمن"),
    ("حتماً", "حتماً"),
    ("حتمًا", "حتماً"),
    ("تأثیر إسلام ٱلله", "تاثیر اسلام الله"),
    ("مسئول و مؤثر", "مسئول و مؤثر"),
    ("دایرة المعارف و فاطمة", "دایرت المعارف و فاطمه"),
    ("خانۀ ما، خانهٔ ما، خانه ی ما، خانه|ی ما", "خانه|ی ما, خانه|ی ما, خانه|ی ما, خانه|ی ما"),
    ("«سلام»، گفت؛ چرا؟ بله…", "سلام, گفت; چرا? بله..."),
    ("نیابم ، رفت .", "نیابم, رفت."),
    ("سلام،خوبی؟بله", "سلام, خوبی? بله"),
    ("رفت.بعد «آمد.»سپس، پ.ن.", "رفت. بعد آمد. سپس, پ.ن."),
    ("\u202bسلام\u202c \ufeffدنیا\u200f", "سلام دنیا"),
    # half-spaces
    ("می||روم", "می|روم"),
    ("می\u200bروم می¬روم", "می|روم می|روم"),
    ("|سلام| |دنیا|", "سلام دنیا"),
    ("می| روم", "می|روم"),
    ("کار|ها و کارها و کار ها", "کارها و کارها و کارها"),
    ("می روم و نمی دانم", "می|روم و نمی|دانم"),
    ("می رفت، می خواهم، می گویند", "می|رفت, می|خواهم, می|گویند"),
    ("میروم و نمیخواهم و میکنند", "می|روم و نمی|خواهم و می|کنند"),
    ("میگه نمیشه", "می|گه نمی|شه"),
    ("میدان شهر، میان ما، میوه، میلاد، میراث، میز", "میدان شهر, میان ما, میوه, میلاد, میراث, میز"),
    ("ماه می رفتم", "ماه می رفتم"),
    ("می ناب و می و معشوق", "می ناب و می و معشوق"),
    ("می خورده|اند، می گفته|است", "می|خورده|اند, می|گفته|است"),
    ("می توان، نمی توان، میتوان، می بایست", "می|توان, نمی|توان, می|توان, می|بایست"),
    ("می فرماید، می تابد، می پسندید، می ترساند", "می|فرماید, می|تابد, می|پسندید, می|ترساند"),
    ("میذارم، میشینه، میده، نمیشی، چشم میشی", "می|ذارم, می|شینه, می|ده, نمی|شی, چشم میشی"),
    ("کتاب ها و کتاب های من و کتاب هایی", "کتاب|ها و کتاب|های من و کتاب|هایی"),
    ("آن ها خانه هایشان را دیدند", "آن|ها خانه|هایشان را دیدند"),
    ("های های گریه کرد", "های های گریه کرد"),
    ("آنها و کتابهای من و سالهایی، روزها", "آن|ها و کتاب|های من و سال|هایی, روزها"),
    ("تنهایی، انتهای شب، گرانبها، بینهایت، الهام", "تنهایی, انتهای شب, گرانبها, بینهایت, الهام"),
    ("دوست هام و بچه هاشون، ده ها نفر", "دوست|هام و بچه|هاشون, ده|ها نفر"),
    ("تن های خسته، یک هات داگ، دریاچه هامون", "تن|های خسته, یک هات داگ, دریاچه هامون"),
    ("بزرگ تر و بزرگ ترین شهر", "بزرگ|تر و بزرگ|ترین شهر"),
    ("کوچکتر، مهمترین، بزرگتر ها، دفتر", "کوچک|تر, مهم|ترین, بزرگ|ترها, دفتر"),
    ("بیش تر، کم|تر، بیشترین|ها، به|تر، کم|تردد", "بیشتر, کمتر, بیشترین|ها, بهتر, کم|تردد"),
    ("بیش|تر|ی، بزرگ|تر|ها", "بیشتری, بزرگ|ترها"),
    ("لباس تر را پوشید", "لباس تر را پوشید"),
    ("رفته ام و گفته اند، خانه اش", "رفته|ام و گفته|اند, خانه|اش"),
    ("ای خدا که ای", "ای خدا که ای"),
    ("راه ام کوه ای", "راه ام کوه ای"),
    ("شیوه ای نو، همسایه ام، شبیه اش", "شیوه|ای نو, همسایه|ام, شبیه اش"),
    ("خانه مان، خونه شون، که شان", "خانه|مان, خونه|شون, که شان"),
    ("همیشه ای کاش", "همیشه ای کاش"),
    ("سی ام بهمن، سی امین", "سی|ام بهمن, سی|امین"),
    # numbers
    ("۱۲۳۴۵۶۷ نفر", "یک میلیون و دویست و سی و چهار هزار و پانصد و شصت و هفت نفر"),
    ("۱۰۰، ۱۰۱، 1000، ٢٠٠٠", "صد, صد و یک, هزار, دو هزار"),
    ("۳٫۱۴ و ۳.۵ و ۳/۵ و ۰٫۰۵", "سه ممیز چهارده و سه ممیز پنج و سه ممیز پنج و صفر ممیز صفر پنج"),
    ("۱۲٬۵۰۰ تومان و 12,500 ریال", "دوازده هزار و پانصد تومان و دوازده هزار و پانصد ریال"),
    ("۱۲،۵۰۰ تومان", "دوازده هزار و پانصد تومان"),
    ("۲۰٪ و ٪۲۰ و 20%", "بیست درصد و بیست درصد و بیست درصد"),
    ("۱۰٪-۱۵٪ و ۵°-۱۰°", "ده تا پانزده درصد و پنج درجه-ده درجه"),
    ("۵۰۰/۰۰۰ ریال و ۲۵۰.۰۰۰ تومان", "پانصد هزار ریال و دویست و پنجاه هزار تومان"),
    ("۳۵°C و ۲۰ ℃", "سی و پنج درجه سانتی|گراد و بیست درجه سانتی|گراد"),
    ("۲½ کیلو", "دو و نیم کیلو"),
    ("-۵ درجه و −۵°", "منفی پنج درجه و منفی پنج درجه"),
    ("۲م و ۳ام و 5ام و ۳۰ام", "دوم و سوم و پنجم و سی|ام"),
    ("۲۳ امین و ۴|مین", "بیست و سومین و چهارمین"),
    ("۳-۵ نفر و ۳ تا ۵ و ۳–۵", "سه تا پنج نفر و سه تا پنج و سه تا پنج"),
    ("ساعت ۱۲:۳۰ و ۱۲:۰۰", "ساعت دوازده و سی دقیقه و دوازده"),
    ("۱۴۰۲/۰۵/۱۲", "دوازدهم مرداد هزار و چهارصد و دو"),
    ("۹۹/۱۲/۲۹ و ۲۹/۱۲/۹۹", "بیست و نهم اسفند نود و نه و بیست و نهم اسفند نود و نه"),
    ("12/05/1402 و 2023-05-12", "دوازدهم مرداد هزار و چهارصد و دو و دوازدهم مه دو هزار و بیست و سه"),
    ("09121234567", "صفر نه یک دو یک دو سه چهار پنج شش هفت"),
    ("۰۲۱-۸۸۷۷", "صفر دو یک, هشت هشت هفت هفت"),
    ("$5 و ۵$ و $3.50 و €20", "پنج دلار و پنج دلار و سه دلار و پنجاه سنت و بیست یورو"),
    ("$5 میلیون", "پنج میلیون دلار"),
    ("۵۰۰ ﷼", "پانصد ریال"),
    ("۵تا سیب و ۲۰ساله", "پنج تا سیب و بیست ساله"),
    ("۱۲۳۴۵۶۷۸۹۰۱۲۳۴۵۶", "یک دو سه چهار پنج شش هفت هشت نه صفر یک دو سه چهار پنج شش"),
    # abbreviations and Latin
    ("۳۰۰ ق.م و ۱۳۰۰ ه.ش", "سیصد قبل از میلاد و هزار و سیصد هجری شمسی"),
    ("۱۴۰۰ ه. ق.", "هزار و چهارصد هجری قمری"),
    ("سال ۱۹۷۹ م.", "سال هزار و نهصد و هفتاد و نه میلادی"),
    ("ص. ۲۵", "صفحه بیست و پنج"),
    ("صص ۱۲-۱۵", "صفحات دوازده تا پانزده"),
    ("۱۹۷۹م و ۱۳۵۷ ش", "هزار و نهصد و هفتاد و نه میلادی و هزار و سیصد و پنجاه و هفت هجری شمسی"),
    ("۱۲۰۰ ق.م، ۱۰۰۰م", "هزار و دویست قبل از میلاد, هزارم"),
    ("امام رضا(ع) و محمد(ص)", "امام رضا علیه السلام و محمد صلی الله علیه و آله"),
    ("علی (ع) و پیامبر (ص)", "علی علیه السلام و پیامبر صلی الله علیه و آله"),
    ("رفتم. خوردم.", "رفتم. خوردم."),
    ("من از Windows 11 و GPT-4 استفاده می|کنم", "من از windows یازده و gpt-چهار استفاده می|کنم"),
]  # fmt: skip

CASES = [(language, written, spoken) for language, cases in SPOKEN.items() for written, spoken in cases]
SPEAKABLE = [language for language in LANGUAGES if language != "zh"]  # pinyin marks its tones with digits


@pytest.mark.parametrize(("language", "written", "spoken"), CASES)
def test_written_becomes_spoken(language: str, written: str, spoken: str) -> None:
    if language == "ja":
        pytest.importorskip("cutlet")
    assert normalize(written, language) == unicodedata.normalize("NFC", spoken)


@pytest.mark.parametrize(("written", "spoken"), PERSIAN)
def test_persian(written: str, spoken: str) -> None:
    assert normalize(written.replace("|", ZWNJ), "fa").replace(ZWNJ, "|") == spoken


@pytest.mark.parametrize("language", [language for language in LANGUAGES if language not in ("zh", "ja", "ko")])
def test_spoken_text_stays_as_it_is(language: str) -> None:
    for written, _ in SPOKEN.get(language, PERSIAN):
        once = normalize(written.replace("|", ZWNJ), language)
        assert normalize(once, language) == once


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("fa", {
            "0": "صفر", "11": "یازده", "21": "بیست و یک", "110": "صد و ده", "999": "نهصد و نود و نه",
            "1001": "هزار و یک", "11000": "یازده هزار", "1000000": "یک میلیون", "105000": "صد و پنج هزار",
            "1001001": "یک میلیون و هزار و یک", "2000000000": "دو میلیارد", "5000000000000": "پنج تریلیون",
        }),
        ("zh", {
            "10": "十", "12": "十二", "110": "一百一十", "1005": "一千零五", "10010": "一万零一十",
            "20000": "两万", "120000": "十二万", "1000010": "一百万零一十", "100000000": "一亿",
            "100010000": "一亿零一万",
        }),
    ],
)  # fmt: skip
def test_cardinals(language: str, words: dict[str, str]) -> None:
    assert {value: cardinal(value, language) for value in words} == words


def test_persian_ordinals() -> None:
    assert [ordinal(value, "fa") for value in ("1", "2", "3", "10", "23", "30", "33", "100", "1000")] == [
        "یکم", "دوم", "سوم", "دهم", "بیست و سوم", f"سی{ZWNJ}ام", "سی و سوم", "صدم", "هزارم",
    ]  # fmt: skip


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_whole_number_has_words(language: str) -> None:
    values = [*range(130), 200, 999, 1000, 1001, 2023, *(10**power + 7 for power in range(4, 20))]
    for value in values:
        words = cardinal(str(value), language) + ordinal(str(value), language)
        assert words and not re.search(r"\d", words)


@pytest.mark.parametrize(
    ("number", "thousands", "parts"),
    [
        ("1,234", ",", ("1234", "")), ("1.234", ",", ("1", "234")), ("1.234,5", ".", ("1234", "5")),
        ("1,234.5", ".", ("1234", "5")), ("0,123", ",", ("0", "123")), ("1,00,000", ",", ("100000", "")),
        ("1.2.3", ".", None), ("1'000", ",", ("1000", "")), ("12", ",", ("12", "")),
        ("1.234.567", ",", ("1234567", "")),
    ],
)  # fmt: skip
def test_separators(number: str, thousands: str, parts: tuple[str, str] | None) -> None:
    assert split_number(number, thousands) == parts


@pytest.mark.parametrize(
    ("rule", "forms"),
    [
        ("russian", "one few many many many one few one"),
        ("polish", "one few many many many many few many"),
        ("czech", "one few many many many many many many"),
    ],
)
def test_plurals_follow_the_language(rule: str, forms: str) -> None:
    counts = ("1", "2", "5", "11", "12", "21", "22", "1001")
    assert [plural_form(count, ["one", "few", "many"], rule) for count in counts] == forms.split()


@pytest.mark.parametrize("language", LANGUAGES)
def test_tables_cover_the_common_symbols(language: str) -> None:
    table = tables.load_table(language)
    assert set("&@%#$£€°+−=×÷±§№½¼¾²³ºª") <= set(table.symbols)
    assert set("$€£%°") <= set(table.units)
    for pattern, replacement in [*table.repairs, *table.before_noun, *table.before_feminine]:
        re.sub(pattern, replacement, "")


def test_region_is_ignored_and_unknown_language_names_the_known() -> None:
    assert normalize("20%", "pt-BR") == normalize("20%", "pt") == "vinte por cento"
    assert normalize("你好", "zh-cn") == "ni3hao3"
    with pytest.raises(ConfigError, match=r"'vi'.*en, es, .*fa"):
        normalize("xin", "vi")


WRITTEN = st.text(
    st.one_of(
        st.characters(),
        st.sampled_from(" .,-:/'%$€£°º0123456789۱۲۳٤٥६७８９½²№"),
        st.sampled_from("aAIİéßñжクا می‌ها कि한中"),
    ),
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(text=WRITTEN)
@pytest.mark.parametrize("language", [language for language in SPEAKABLE if language != "ja"])
def test_any_string_is_spoken(language: str, text: str) -> None:
    spoken = normalize(text, language)
    assert spoken == spoken.strip() and "  " not in spoken
    assert not any(character.isdigit() for character in spoken)
    kept = ZWNJ if language == "fa" else ""
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn") for c in spoken if c not in kept)


@settings(max_examples=40, deadline=None)
@given(text=WRITTEN)
def test_any_string_becomes_pinyin_and_romaji(text: str) -> None:
    assert "  " not in normalize(text, "zh")
    pytest.importorskip("cutlet")
    assert not any(character.isdigit() for character in normalize(text, "ja"))


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from(" .,!?abcdeéñçüŞğabcمیرومکتابهاخانه\u200c‌"), max_size=40))
@pytest.mark.parametrize("language", ["en", "fr", "tr", "fa"])
def test_normalising_twice_changes_nothing(language: str, text: str) -> None:
    once = normalize(text, language)
    assert normalize(once, language) == once


@pytest.mark.parametrize("language", SPEAKABLE)
def test_enormous_numbers(language: str) -> None:
    if language == "ja":
        pytest.importorskip("cutlet")
    for text in ("9" * 400, "1" + ",000" * 40, "0." + "123" * 40, "-" + "7" * 30 + "%", "$" + "8" * 40 + ".25"):
        assert not re.search(r"\d", normalize(text, language))
    assert not re.search(r"\d", normalize("1" * 5000, "en"))


def test_import_is_cheap_and_loads_no_speaking_package() -> None:
    code = (
        "import sys, time; t = time.perf_counter();"
        "import myxtts.text.normalize as n; took = time.perf_counter() - t;"
        "n.normalize('No digits here, Dr. Who.', 'en'); n.normalize_fingerprint();"
        "print([m for m in ('num2words', 'pypinyin', 'hangul_romanize', 'cutlet') if m in sys.modules], took)"
    )
    loaded, took = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert loaded == "[]"
    assert float(took) < 0.5  # the target is 30 ms; the rest is room for a busy machine


def test_sentences_without_digits_are_fast() -> None:
    sentence = "The overwhelming majority of people in this country know how to sift the wheat from the chaff."
    best_s = min(timeit.repeat(lambda: normalize(sentence, "en"), number=500)) / 500
    assert best_s < 60e-6  # the target is 15 µs; the rest is room for a busy machine


@pytest.fixture
def fresh_fingerprint() -> Iterator[None]:
    normalize_fingerprint.cache_clear()
    yield
    normalize_fingerprint.cache_clear()


@pytest.mark.usefixtures("fresh_fingerprint")
def test_fingerprint_follows_the_tables(tmp_path, monkeypatch) -> None:
    before = normalize_fingerprint()
    assert re.fullmatch(r"[0-9a-f]{16}", before)
    copy = shutil.copytree(tables.TABLES_FOLDER, tmp_path / "languages")
    monkeypatch.setattr(tables, "TABLES_FOLDER", copy)
    normalize_fingerprint.cache_clear()
    assert normalize_fingerprint() == before
    table = copy / "fa.toml"
    table.write_text(table.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
    normalize_fingerprint.cache_clear()
    assert normalize_fingerprint() != before


@pytest.mark.usefixtures("fresh_fingerprint")
def test_fingerprint_follows_package_versions(monkeypatch) -> None:
    before = normalize_fingerprint()
    found = tables._installed(PACKAGES)
    assert any(name.startswith("num2words-") for name in found)
    assert all(name.endswith((".dist-info", ".egg-info")) for name in found)  # fugashi-info is a program
    monkeypatch.setattr(tables, "_installed", lambda packages: [f"{packages[0]}-999.dist-info"])
    normalize_fingerprint.cache_clear()
    assert normalize_fingerprint() != before


# Phonemes.

installed = importlib.util.find_spec("espeakng_loader") or ctypes.util.find_library("espeak-ng")
needs_espeak = pytest.mark.skipif(not installed, reason='needs espeak-ng: pip install "myxtts[phonemes]"')


@pytest.fixture
def fresh_library() -> Iterator[None]:
    """Makes the next call open the library again, and the one after the test too."""
    normalize_module.open_library.cache_clear()
    yield
    normalize_module.open_library.cache_clear()


@needs_espeak
def test_known_words() -> None:
    known = {"en": ("hello", "həlˈoʊ"), "de": ("guten Morgen", "ɡˈuːtən mˈɔɾɡən"), "fa": ("سلام", "salˈɑm")}
    for language, (word, expected) in known.items():
        assert phonemize([word], language) == [expected]
    assert phonemes_fingerprint().startswith("espeak-ng 1.")


@needs_espeak
def test_every_language_but_the_romanised_ones_has_a_voice() -> None:
    assert set(voices()) == set(LANGUAGES) - {"ko", "ja"}
    assert all(phonemize(["a"], language) != [""] for language in voices())
    assert phonemize(["chat"], "fr") != phonemize(["chat"], "en")
    for language in ("ko", "xx"):
        with pytest.raises(ConfigError, match=language):
            phonemize(["annyeong"], language)


@needs_espeak
def test_punctuation_and_spaces_survive() -> None:
    hello, world = phonemize(["hello", "world"], "en")
    assert phonemize(["Hello, world! hello... (world) - hello?"], "en") == [
        f"{hello}, {world}! {hello}... ({world}) - {hello}?"
    ]
    salam = phonemize(["سلام"], "fa")[0]
    assert phonemize(["سلام، سلام؟"], "fa") == [f"{salam}، {salam}؟"]
    assert phonemize(["", "...", " ? "], "en") == ["", "...", " ? "]


@needs_espeak
def test_numbers_and_words_are_not_cut() -> None:
    number, clitic, compound = phonemize(["3.5", "don't", "well-known"], "en")
    assert "." not in number and len(number.split()) == 3
    assert "'" not in clitic and "-" not in compound
    assert phonemize(["3.5, don't"], "en") == [f"{number}, {clitic}"]


@needs_espeak
def test_long_text_foreign_words_and_nul() -> None:
    (long,) = phonemize(["word " * 500], "en")
    assert len(long.split()) == 500
    (mixed,) = phonemize(["سلام hello"], "fa")
    assert "(" not in mixed and len(mixed.split()) == 2
    assert phonemize(["hello\0world"], "en") == phonemize(["hello world"], "en")


@needs_espeak
def test_four_threads_give_what_one_gives() -> None:
    english = [f"the number {number} was written, then forgotten" for number in range(60)]
    persian = ["سلام دنیا", "کتاب را می‌خوانم"] * 30
    jobs = [(english, "en"), (persian, "fa")] * 12
    expected = [phonemize(texts, language) for texts, language in jobs[:2]] * 12
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda job: phonemize(*job), jobs)) == expected


@pytest.mark.usefixtures("fresh_library")
def test_missing_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    monkeypatch.setattr(ctypes.util, "find_library", lambda _: None)
    for call in (lambda: phonemize(["hello"], "en"), phonemes_fingerprint):
        with pytest.raises(ConfigError, match=r'pip install "myxtts\[phonemes\]"'):
            call()


@needs_espeak
@pytest.mark.usefixtures("fresh_library")
def test_system_library_is_used_without_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    library, _ = normalize_module._find_library()
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: f"lib{name}.so.1")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: opened.append(name) or library)
    assert normalize_module._find_library() == (library, None)
    assert opened == ["libespeak-ng.so.1"]


@needs_espeak
def test_unreadable_data_is_an_error_not_the_end_of_the_process() -> None:
    """In a process of its own: initialised twice, the library would lose its data for the other tests."""
    code = (
        "from myxtts.errors import ConfigError; from myxtts.text import normalize\n"
        "library, _ = normalize._find_library()\n"
        "normalize._find_library = lambda: (library, '/nowhere/espeak-ng-data')\n"
        "try: normalize.phonemize(['hello'], 'en')\n"
        "except ConfigError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "/nowhere/espeak-ng-data" in result.stdout
